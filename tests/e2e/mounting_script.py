"""What a Python script needs to mount in a container that has the modules of the proxy, without a FUSE program."""

#: `mount(name)` mounts on a new directory /tmp/NAME, and returns the descriptor of /dev/fuse.
MOUNT = """
import os, sys
sys.path.insert(0, "/usr/lib/python3/dist-packages")
from fusermount3_proxy import approach, client, wire

def mount(name):
    place = b"/tmp/" + name
    os.makedirs(place, exist_ok=True)
    request = wire.MountRequest(mountpoint=place, options=b"subtype=script")
    answer = client.ask(approach.DEFAULT_PATH, request, os.open(place, os.O_PATH))
    assert answer.reply.errno == 0, answer.reply.text
    client.commit(answer)
    answer.connection.close()
    return answer.descriptor
"""
