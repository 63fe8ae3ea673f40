tool mail_list '{}' >/dev/null
tool mail_search '{"query": "deliver"}' >/dev/null
tool mail_get '{"id": "m-1"}' >/dev/null
tool mail_get '{"id": "m-2"}' >/dev/null
tool mail_get '{"id": "m-3"}' >/dev/null
echo 'CANNOT: there is no message of Ines Roth in the mailbox.'
