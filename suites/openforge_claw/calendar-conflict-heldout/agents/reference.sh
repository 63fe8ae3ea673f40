tool calendar_list '{"date": "2031-05-15"}' >/dev/null
tool calendar_update '{"id": "e-2", "start": "2031-05-15T13:00", "end": "2031-05-15T13:30"}' >/dev/null
echo 'Coffee is at 13:00 now.'
