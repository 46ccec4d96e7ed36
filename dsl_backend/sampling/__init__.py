# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: temperature, min-p, top-k, top-p, and a draw that (seed, position) alone decides."""
