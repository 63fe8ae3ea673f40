tool calendar_create '{"title": "Eye test", "start": "2031-06-12T10:40", "end": "2031-06-12T12:00", "place": "Mill Lane 19"}' >/dev/null
echo 'It is in the calendar.'
