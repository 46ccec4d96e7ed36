# SPDX-License-Identifier: Apache-2.0
"""The sampler in Triton, for every GPU that has no kernel of its own."""
