"""The proxy: what runs in the container under the name of ``fusermount3``.

Read in this order: `cli` tells the story of one call; `commandline` reads the arguments; `mountpoint` finds and
pins the place; `comm` is the socket back to the FUSE program; `approach` finds the broker; `client` is the talk with
it; `wire` is what travels. `programs` is what the executable is under other names. Nothing here imports anything but
built-in modules and the modules beside it: the code is frozen into a static executable and runs in a core-only
interpreter, where no library and no file exist.
"""

__version__ = "0.1.0"

#: The release of fusermount3 whose behaviour the proxy offers, and which ``-V`` prints: callers such as blobfuse2
#: and JuiceFS choose what they do by it.
FUSERMOUNT_VERSION = "3.18.2"
