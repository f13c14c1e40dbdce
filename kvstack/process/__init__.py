"""
The child process and this machine: spawned, watched, stopped; looked at.

    supervisor    a launch and hooks -> the life of llama-server; the one writer of the stack's state
    contract      the supervisor's terms: launch, hooks, what a child must be able to do
    child         a launch -> one process group, sampled, signalled, its exit described
    pipes         the child's output -> raw log, lines for the event loop, the last lines
    watchdog      samples and times -> a start is stalled, a ready server is hung
    cancellation  work -> done, unless somebody asks to stop or time is up
    shutdown      a child -> ended: asked, asked again, killed
    exit_report   exit status and last lines -> why it died, in three parts
    attach        a health check -> there, missed, back: for a server that somebody else started
    identity      a pid -> who that is; who holds a port; what a killed run left
    parent_death  a program -> run so that it does not outlive kvstack
    descriptors   the limit of open files, raised
    probe         a binary -> its capabilities
    models        `server.model` -> the file, assembled if it comes in parts
    machine       `/proc`, `/sys`, drivers -> facts for the doctor
    _posix        signals, groups and kernel evidence of each system
    _windows      signals, groups and kernel evidence of each system
"""
