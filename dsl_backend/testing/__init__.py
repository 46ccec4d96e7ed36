# SPDX-License-Identifier: Apache-2.0
"""Problems, oracles and error budgets, for tests, fuzzers and benchmarks.

Of the rest of the package only `dsl-backend verify` imports it.
"""
