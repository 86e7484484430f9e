"""Makes a release: `version` the commit and the tag, `build` the files, `statements` what vouches for them.

`make release VERSION=1.2.3` runs `__main__`, `make release-check` runs `check`; see docs/releases.md.
"""
