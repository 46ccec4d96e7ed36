# SPDX-License-Identifier: Apache-2.0
"""Serves what lies between a model's qkv projections and its attention: norms of heads, rotation, cache write."""
