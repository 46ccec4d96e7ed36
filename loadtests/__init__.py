# SPDX-License-Identifier: Apache-2.0
"""Load tests: a locust client for streaming completions, and comparisons of backends under the same load."""
