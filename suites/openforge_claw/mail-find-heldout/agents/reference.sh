tool mail_search '{"query": "Oslo"}' >/dev/null
tool mail_get '{"id": "m-3"}' >/dev/null
echo HB4-820
