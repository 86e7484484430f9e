"""Makes a release, see CONTRIBUTING.md."""
