"""
What a step does, for the rows of a `generate` call and for requests in flight.

- `engine`: a step of many requests: admit → read prompts → propose → score → accept → commit; `prompt_reading`,
  `grouping`: the prompts it reads, and the rows it drafts for together.
- `request`, `scheduler`, `stopping`: a request, when it is admitted and read, when it ends.
- `target`: how the target reads prompts and scores trees.
- `host_step`: the phases of a step that the host runs; `temperatures`: draft temperatures, learnt over requests.
- `tree_choice`, `policy`: the tree of each request, and whether there is one.
- `accepting`, `bookkeeping`: what is kept of the drafts, and what is counted.
- `captured`: whole steps in CUDA graphs.
"""
