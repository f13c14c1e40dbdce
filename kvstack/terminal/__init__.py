"""
The person: verbs, dashboard, plain lines.

    cli             argv -> exit code; imports every verb
    app             the typer app and the arguments that verbs share
    commands        one module a verb
    dashboard       stack state -> frames; the live loop
    foreground      Plan -> a stack in this process: signals, dashboard or plain lines
    background      `up -d`: the same command in a session of its own
    control_client  name or config -> run file -> control routes of a running stack
    config_file     path -> parsed config, or the error to show
    last_run        name -> how the last run of a stack ended
    output          results and errors -> stdout, stderr, JSON envelope
    plain_lines     events -> lines for pipes and services
    format          numbers -> text with units
"""
