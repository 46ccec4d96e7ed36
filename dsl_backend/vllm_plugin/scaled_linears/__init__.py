# SPDX-License-Identifier: Apache-2.0
"""Linear layers of fp8 checkpoints: find them, give them this package's kernels, link MLPs into two launches."""
