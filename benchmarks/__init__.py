"""Benchmarks: each answers one question, as a ratio to a reference measured in the same run.

    make bench                                           all of them, at a size for two cores
    python -m benchmarks save_vs_line_rate --bytes 4GiB  one of them
    python -m benchmarks --output results.jsonl          appends a line of JSON per answer

A table goes to standard error, a line of JSON per answer to standard output or to `--output`.
"""
