"""
Config and the binary's abilities -> the command line.

    capabilities    output of `--version`, `--help` and `--list-devices` -> flags, build, devices
    argv            config, capabilities -> argv, environment, notices of what this build cannot do
    reserved_flags  `extra_args` and `[server.env]` -> problems with flags that belong to kvstack
"""
