"""Compare the genuine fusermount3 with the proxy: both get the same calls, and all visible results are compared.

Read in this order:

- `model`       a `Case` is one call with its surroundings, an `Observation` is its result, as far as a caller sees it;
- `worker`      runs cases: a small process in its own namespaces, one with the genuine helper, one with the proxy;
- `sides`       starts the workers, and the brokers that serve the proxy, and runs a case on both sides;
- `corpus`      every case of the contract that can be provoked;
- `grammar`     the argument vectors and option strings that hypothesis generates;
- `deviations`  the single table of intended differences. A difference that is not in the table is a failure, and so is
  an entry that no longer occurs.

The genuine helper is that of Debian's releases, setuid root in a root filesystem of its release.
"""
