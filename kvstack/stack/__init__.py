"""
The composition root: a config becomes a running stack.

    plan             a config -> everything that can fail before a process is started
    stack            a plan -> running parts, started and stopped in order
    ports            an address -> a listening socket, or who holds the port
    server_identity  a healthy server -> our own or not, and what it says of itself
    rules_loader     a config -> its compiled rules and the prompt to warm
    preflight        a config file -> all its problems
"""
