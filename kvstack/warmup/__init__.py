"""
Prefixes as files: found, restored, validated, at the right moment.

    warmup      the warm-up request -> an evaluated prefix, by snapshot or by the chat form
    snapshots   the warm-up request after the rules -> a prefix restored into slot 0, or saved from it
    prefix      a chat request -> the exact tokens that its conversations share
    identity    everything that a cache's content depends on -> the snapshot's name
    store       a snapshot's name -> its files, checked, bounded, removed
    pause       the wish to fill a slot -> clients held back; which conversations have a slot
    validation  answers after a restore -> the snapshot accepted or rejected
"""
