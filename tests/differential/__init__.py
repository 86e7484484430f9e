"""The genuine fusermount3 and the proxy get the same calls, and everything that a caller can see is compared.

Read in this order:

- `model`       a `Case` is one call with its surroundings, an `Observation` is what came of it;
- `worker`      runs cases: a small process in namespaces of its own, one beside the genuine helper, one beside the
  proxy;
- `sides`       starts the workers, and the brokers that answer the proxy, and puts a case to both sides;
- `corpus`      every case of the contract that can be provoked;
- `grammar`     what hypothesis generates argument vectors and option strings from;
- `deviations`  the one table of what is different on purpose. Whatever is not in it is a failure, and so is what is
  in it and is not different any more.

The genuine helper is that of Debian's releases, setuid root in a root filesystem of its release.
"""
