"""
Measuring what a draft is worth: `hf-specdec bench`, `hf-specdec tune` and `hf-specdec bench --suite gpu`.

The method is the same everywhere. All that is compared runs in one process, in turn; greedy texts are compared with
plain `generate` in float32 before anything is timed; tokens are counted from their ids; a speed-up is total tokens /
total seconds of the one over that of the other.
"""
