"""Runtime of the generated code: groups, calls, gradients, the cache of programs."""
