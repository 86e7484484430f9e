/*
 * Carries out the call and exits, if it is plain and succeeds. Otherwise returns, for Python to carry it out: -1, or
 * the connection to the broker on which the request has been sent, the reply to which nobody has received yet.
 */
int fast_path(int argc, char *const argv[]);
