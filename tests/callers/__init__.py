"""The callers of fusermount3, unmodified, each in an unprivileged container; and the table of what works.

Read in this order:

- `callers`       what is run: programs of Debian's, and our smallest filesystem on each library;
- `images`, `build`   where they come from; what can't be downloaded is not run, and in CI that is a failure;
- `machines`      the containers that they run in, and a test's place there; `s3` is the server that s3fs needs;
- `test_callers`  what is done with each of them;
- `table`         the section on callers of docs/compatibility.md, which is written from what was seen.
"""
