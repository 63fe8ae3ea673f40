tool mail_get '{"id": "m-2"}' >/dev/null
tool notes_search '{"query": "meetings"}' >/dev/null
tool notes_get '{"id": "n-2"}' >/dev/null
tool calendar_list '{"date": "2031-05-15"}' >/dev/null
tool calendar_create '{"title": "Rosa", "start": "2031-05-15T14:00", "end": "2031-05-15T14:45", "attendees": ["Kim", "Lee"]}' >/dev/null
tool mail_send '{"to": ["rosa@field.example"], "subject": "Re: Meeting", "in_reply_to": "m-2", "body": "Kim and Lee meet you at 14:00."}' >/dev/null
echo 'Rosa comes at 14:00.'
