# SPDX-License-Identifier: Apache-2.0
"""Softmax and log-softmax over the rows of a matrix."""
