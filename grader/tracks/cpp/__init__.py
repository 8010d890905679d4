"""C++ submissions: build, official cases, probes."""
