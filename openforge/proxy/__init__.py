"""The recording proxy between a harness and the policy server.

`server` serves sessions, `chat`, `responses` and `messages` are its dialects (`dialect` says what one is), `upstream`
asks the policy, `journal` is what is on disk before an answer leaves (`deltas` says in which form), `lineage` turns a
journal into rows of the calls table (`threads` finds what extends what, `trained` what is trained), `control` opens and
closes sessions, `serving` is a proxy's process, `client` starts and drives one from a rollout job, `public` is its
address for sandboxes off this host, `relay` what leads there.
"""
