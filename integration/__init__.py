# SPDX-License-Identifier: Apache-2.0
"""End-to-end checks against a real vLLM: random checkpoints, servers and offline engines."""
