"""The proxy: the program that runs in the container under the name ``fusermount3``.

Read in this order: `cli` carries out one call; `commandline` parses the arguments; `mountpoint` finds and pins the
mountpoint; `comm` is the socket back to the FUSE program; `approach` finds the broker; `client` exchanges messages
with it; `wire` defines those messages. `programs` dispatches the executable's other names. The package imports only
built-in modules and its own: the code is frozen into a static executable and runs in a core-only interpreter, which
has no library and no files.
"""

#: The release of the project, defined only here. tests/unit/packaging/test_version.py compares it with
#: debian/changelog, the Helm chart and every other file that has to repeat it.
__version__ = "0.1.0"

#: The release of fusermount3 whose behaviour the proxy implements. ``-V`` prints it under every name, and under the
#: helper's names prints nothing else: callers such as blobfuse2 and JuiceFS choose their behaviour by it.
FUSERMOUNT_VERSION = "3.18.2"
