# SPDX-License-Identifier: Apache-2.0
"""Formats of values and their scales: how caches, and later weights and activations, are stored."""
