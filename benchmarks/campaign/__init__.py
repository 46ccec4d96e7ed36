# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks campaign`: all measurements and tests that need a GPU, within a time limit.

It keeps all GPUs of a host busy: each step runs in a process of its own on one GPU, or on several, and the next step
starts when they are free. A step that would end too late is stopped, and what it wrote until then is kept.

`steps` has what is run, `execution` runs it, `findings` says in few lines what came out.
"""
