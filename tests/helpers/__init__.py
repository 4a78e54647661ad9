"""What the tests share: models, programs to compile, oracles, and worker processes."""
