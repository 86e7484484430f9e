"""Names of the sockets of volumes: what the CSI plugin accepts, the front makes and the mounter checks."""

#: Bytes of a socket's name in a pod's directory, so that with `SECOND_SOCKET` appended it fits into an address
#: (unix(7)).
LONGEST_SOCKET = 97
#: Suffix of the socket for new clients, appended to the name of the socket for old ones.
SECOND_SOCKET = b".seqpacket"
#: Digits of the nonce, in a socket's name before it gets its final one.
LONGEST_NONCE = 16
