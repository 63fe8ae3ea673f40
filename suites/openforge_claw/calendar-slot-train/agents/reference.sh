tool calendar_list '{"date": "2031-05-14"}' >/dev/null
tool calendar_create '{"title": "Planning", "start": "2031-05-14T12:00", "end": "2031-05-14T13:00", "attendees": ["Ana", "Bo", "Cy"]}' >/dev/null
echo 'Planning is in the calendar.'
