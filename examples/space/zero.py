"""`@gpu`: on ZeroGPU a function runs with a GPU, elsewhere as it is."""

try:
    import spaces
except ImportError:

    def gpu(function):
        return function

else:
    gpu = spaces.GPU
