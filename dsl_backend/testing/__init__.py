# SPDX-License-Identifier: Apache-2.0
"""Problems, oracles and error budgets, for tests, fuzzers and benchmarks. The rest of the package never imports it."""
