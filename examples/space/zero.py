"""`@gpu`: on ZeroGPU a function runs with a GPU, elsewhere as it is."""

try:
    import spaces
except ImportError:
    ON_ZERO = False

    def gpu(function):
        return function

else:
    ON_ZERO = True
    gpu = spaces.GPU
