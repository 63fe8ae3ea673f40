tool calendar_list '{"date": "2031-05-14"}' >/dev/null
echo 'CANNOT: there is no free hour that Ana, Bo and Cy share on that day.'
