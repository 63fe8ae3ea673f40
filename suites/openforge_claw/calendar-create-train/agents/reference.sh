tool calendar_create '{"title": "Dentist", "start": "2031-05-09T14:30", "end": "2031-05-09T15:15", "place": "Hill Street 4"}' >/dev/null
echo 'It is in the calendar.'
