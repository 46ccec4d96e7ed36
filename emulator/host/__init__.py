# SPDX-License-Identifier: Apache-2.0
"""The host side: compiled CuTe DSL functions run their real host code, and their launches reach Python."""
