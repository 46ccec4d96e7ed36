# SPDX-License-Identifier: Apache-2.0
"""The Triton sampler for SM75 and later."""
