"""pytest fixtures for tests of plugins. pytest loads this module by itself."""
