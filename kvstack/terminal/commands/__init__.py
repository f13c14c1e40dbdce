"""
One module a verb; importing it registers the verb.

    up            `up`
    down          `down`
    status        `status`
    explain       `explain`
    warmup        `warmup`
    logs          `logs`
    check         `check`
    doctor        `doctor`
    capture       `capture`
    rules         `rules list` and `rules test`
    rules_test    replayed requests -> the text of `rules test`
    log_follower  log files -> their last lines, and what is added
"""
