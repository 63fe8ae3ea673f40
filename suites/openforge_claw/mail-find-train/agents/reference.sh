tool mail_search '{"query": "Lisbon"}' >/dev/null
tool mail_get '{"id": "m-3"}' >/dev/null
echo QX7-114
