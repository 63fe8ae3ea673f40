"""The recording proxy between a harness and the policy server.

`server` serves sessions in the dialects `chat`, `responses` and `messages`, `upstream` asks the policy, `journal` is
what is on disk before an answer leaves, `lineage` turns a journal into rows of the calls table, `control` opens and
closes sessions, `serving` is a proxy's process, `client` starts and drives one from a rollout job, `public` is its
address for sandboxes off this host, `relay` what leads there.
"""
