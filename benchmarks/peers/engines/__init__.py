"""One module for each family of contenders, each with a function `start(way, job, arguments)`."""
