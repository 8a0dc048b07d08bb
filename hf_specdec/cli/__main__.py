"""`python -m hf_specdec.cli`, for `accelerate launch --module hf_specdec.cli train …`."""

from . import main


if __name__ == "__main__":
    main()
