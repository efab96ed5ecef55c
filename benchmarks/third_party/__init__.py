"""Models of other people's packages, compiled and compared with themselves in eager mode."""
