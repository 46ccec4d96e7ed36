# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of the package: the only part that imports vllm, and only inside the processes that vLLM starts."""
