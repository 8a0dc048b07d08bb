"""`@gpu`: on ZeroGPU a function runs with a GPU, elsewhere as it is."""

try:
    from spaces import GPU as gpu
except ImportError:

    def gpu(function):
        return function
