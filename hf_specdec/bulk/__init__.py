"""
Bulk jobs: a file of prompts, answered as the server answers requests.

    records.py     the input: a file of JSON lines
    journals.py    the files to which answers are appended as they come, each by one process
    outputs.py     the output: which run it is of, what is done, and the answers in order
    answers.py     an engine, and the server's application in front of it, for records
    job.py         the records of one process, answered
"""

from .answers import Answering, answering
from .job import Job, Progress
from .outputs import Output
from .records import Records


__all__ = ["Answering", "Job", "Output", "Progress", "Records", "answering"]
