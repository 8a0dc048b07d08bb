"""
What a step does, for the rows of a `generate` call and for requests in flight.

- `engine`: a step of many requests: admit → read prompts → propose → score → accept → commit.
- `request`, `scheduler`, `stopping`: a request, when it is admitted and read, when it ends.
- `target`, `distribution`: the target's forwards, and its distributions.
- `drafting`: drafts whose state is kept per request.
- `tree_choice`, `policy`: the tree of each request, and whether there is one.
- `accepting`, `bookkeeping`: what is kept of the drafts, and what is counted.
- `captured`: whole steps in CUDA graphs.
"""
