"""Tests with unmodified callers of fusermount3, each in an unprivileged container, and the table of results.

Read in this order:

- `callers`       the programs: Debian's own, and our smallest filesystem on each library;
- `images`, `build`   their origin; a program that can't be downloaded is not run, and in CI that is a failure;
- `machines`      the containers that they run in, and a test's directory there; `s3` is the server that s3fs needs;
- `test_callers`  the tests of each program;
- `table`         the section on callers of docs/compatibility.md, generated from the results.
"""
